"""Place roles on devices and nodes: compute demands, check that they fit, reserve them."""
