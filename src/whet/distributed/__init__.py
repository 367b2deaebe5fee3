"""Several processes that train one model: who they are, how they start, agree, and sum their gradients."""
