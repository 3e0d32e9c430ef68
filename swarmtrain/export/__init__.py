"""A checkpoint as a Hugging Face LLaMA directory: anyone can load the trained model without this package."""

from swarmtrain.export.directory import MAX_SHARD_BYTES, export_checkpoint

__all__ = ["MAX_SHARD_BYTES", "export_checkpoint"]
