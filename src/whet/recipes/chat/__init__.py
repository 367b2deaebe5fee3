"""Chat: conversations, a model that answers, and talking to it."""
