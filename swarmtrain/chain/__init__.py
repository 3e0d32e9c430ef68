"""What a caller and a callee of the microbatch chain share: the neighbours of a stage, and calling one of them."""
