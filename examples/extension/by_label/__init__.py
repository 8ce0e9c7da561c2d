"""An extension of Penstock by the labels of workers."""
