"""The pieces that models share. Plain torch modules; shapes have B examples first."""
