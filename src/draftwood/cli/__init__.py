"""The command line: one file a command. It reads options, calls the library and shows what came back."""
