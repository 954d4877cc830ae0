"""HTTP servers, real and fake."""
