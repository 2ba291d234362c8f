"""Masks that a recipe can name: a file is a kind of its name, see `mask_kind`.

There is no `prefix`: its tokens see the whole history, and a model that predicts the next event would read it there.
"""
