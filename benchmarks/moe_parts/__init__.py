"""What moe_layer.py is made of: the layers that are compared, and the sweep over tiles of single products."""
