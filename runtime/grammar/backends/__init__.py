"""Grammar libraries, and what is enforced beside them."""
