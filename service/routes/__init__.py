"""The native endpoints, a file a concern."""
