"""The warp-specialised kernels for sm_90, in Gluon."""
