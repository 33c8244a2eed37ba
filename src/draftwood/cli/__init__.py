"""Command line: one file per command. Parses options, calls the library and prints the result."""
