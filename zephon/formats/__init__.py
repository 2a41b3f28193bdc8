"""How the rows of files are found and read; one reader a format."""
