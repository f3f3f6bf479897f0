"""What the operators share: masks, rules of autograd, registration with torch."""
