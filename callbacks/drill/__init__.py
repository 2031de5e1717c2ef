"""The fire drill: runs that are killed and resumed."""
