"""Keeps the interpreter's search for garbage away from requests, which leave none that it would have to find."""

import gc

NEW_OBJECTS = 10_000
"""So many more containers than there were begin a search of the new ones. With 700, as Python has it, the objects of
some sixty requests that are there at once began two, and found nothing."""


def search_seldom() -> None:
    """Search for garbage now, once, and then seldom and without what is loaded by now, which stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
