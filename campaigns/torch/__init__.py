"""Does torch, and what is built on it, compute what it should with overweave in it?"""
