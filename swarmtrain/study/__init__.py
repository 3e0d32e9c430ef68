"""`swarmtrain study`: methods of compression compared on the same tokens, with loss, bytes and time side by side."""
