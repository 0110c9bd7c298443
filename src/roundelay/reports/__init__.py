"""HTML pages about runs (`pages`), and matplotlib plots (`plots`)."""
