"""HTTP and time: settings, application, routes, engine thread, metrics, command line and client."""
