from train.conftest import data

__all__ = ["data"]
