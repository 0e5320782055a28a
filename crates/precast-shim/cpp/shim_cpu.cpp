// The half of the shim that needs no CUDA, as one file: so torch's headers, which take longest, are compiled once.

#include "shim.cpp"
#include "operators.cpp"
#include "eager.cpp"
#include "archive.cpp"
