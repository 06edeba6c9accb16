"""Switches of the kernels, compile-time constants each."""

import triton.language as tl

# Bits of SCORE: what a score consists of, apart from its product
BIAS = tl.constexpr(1)  # one number for each column
SOFTCAP = tl.constexpr(2)
SKIP = tl.constexpr(4)
MASK_SELF = tl.constexpr(8)
ONE_BIAS = tl.constexpr(16)  # the same number for all columns
ROW_BIAS = tl.constexpr(32)  # one number for each row: of small batches whose columns are read as rows

# Values of POSITIVE
DIAGONAL = tl.constexpr(1)  # row_start + i == col_start + j
ONE = tl.constexpr(2)  # row_key holds the global index of the column
MANY = tl.constexpr(3)  # equal keys
PICKED = tl.constexpr(4)  # of the kernels for positives: several columns of each row, given like row_key of ONE

# Bits of STATS, the statistics that a kernel computes, and of TERMS, the terms of G
ROWS = tl.constexpr(1)  # log-sum-exp of rows
COLS = tl.constexpr(2)  # log-sum-exp of columns
SOFTPLUS = tl.constexpr(4)
ROW_SUM = tl.constexpr(8)
MIRROR = tl.constexpr(16)  # scores are symmetric: a column is a row too, and has positives
ENTROPY = tl.constexpr(32)  # of rows, where kernels do not take functions (`statistics`)
TOP = tl.constexpr(64)  # the largest score of a row and its column, likewise
BIAS_TOTAL = tl.constexpr(128)  # sums of G over the rows of each tile, for a bias that all columns share
BIAS_COLS = tl.constexpr(256)  # sums of G over the columns of each tile, for a bias of each column
HOT = tl.constexpr(1024)  # log-sum-exp of rows at another temperature

# Values of GUIDE, how the second score matrix is used
MASK = tl.constexpr(1)
KL = tl.constexpr(2)
REVERSE_KL = tl.constexpr(3)
JSD = tl.constexpr(4)
