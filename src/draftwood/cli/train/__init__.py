"""Commands `draftwood train` and `draftwood export`."""
