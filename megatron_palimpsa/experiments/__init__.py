"""The paper's experiments on synthetic tasks; each package is one of them with its own small trainer."""
