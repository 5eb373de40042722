"""A reading kernel for Hopper, in CUDA C++, compiled when it is first needed. See decode.cu."""
