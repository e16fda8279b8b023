"""Calls of a masked model that go on from what an earlier one computed: ReCAP, and a shortcut of its features."""
