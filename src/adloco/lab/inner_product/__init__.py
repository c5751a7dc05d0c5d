"""The inner-product tests of the batch."""
