"""A trained chat model for programs that speak OpenAI's protocol; behind the guard of `whet.web`.

asking      what a request may say, and what is refused
stops       texts at which an answer ends
answering   one answer at a time, a short queue, and an end when nobody listens any more
shapes      answers, pieces and errors as OpenAI's clients read them
routes      which address answers what
"""
