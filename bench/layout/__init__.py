"""The static plan of whole training steps, beside the allocators that know no lifetimes."""
