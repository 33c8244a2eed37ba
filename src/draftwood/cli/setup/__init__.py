"""draftwood models, drafters, datastore, tune."""
