"""Running many agent loops at once, and what comes out."""
