"""draftwood generate, chat, check, serve."""
