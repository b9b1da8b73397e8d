"""Models of others as stages of ours."""
