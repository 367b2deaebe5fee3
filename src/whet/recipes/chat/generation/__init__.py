"""How a trained model answers: token by token, exactly as if it read everything anew each time.

memory      keys and values of the places that were read, for each of a model's attentions
sampling    which token is taken
decoding    the loop: reads prompts once, then one token after another, several rows at a time
speaking    a run that can be spoken with: its weights, its tokenizer, and what it may say
history     what is left out where a conversation is longer than the model can look back
"""
