"""Select what lies beyond a quantile of the normal distribution with the gradient's mean and deviation."""
