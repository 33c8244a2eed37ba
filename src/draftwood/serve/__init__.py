"""A server that OpenAI's clients talk to: one model, one drafter, requests of many people in one batch."""
