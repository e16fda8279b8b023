"""A regular package: a library may install a `tests` of its own, which would hide one without this file."""
