"""Templates that fill the types of `ir`: communication as data, woven with a matmul."""
