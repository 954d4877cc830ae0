"""Selections: which kept pages a generated token reads."""
