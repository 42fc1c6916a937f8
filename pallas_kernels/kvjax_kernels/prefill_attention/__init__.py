"""Attention of many query tokens, blockwise: never T x T in memory."""
