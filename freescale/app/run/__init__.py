"""What commands about runs do, without parsing or printing: train one, resume it, open it again, describe it.

Programs (`app/program/`), Ray (`app/ray_train.py`) and the command line come here alike.
"""
