"""How much memory will a training step take, and on which machines does it fit?"""
