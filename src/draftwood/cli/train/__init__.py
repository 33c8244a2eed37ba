"""draftwood train, export."""
