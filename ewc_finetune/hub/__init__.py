"""The Hugging Face Hub: addresses, repositories, and what is fetched from them; through its own client and cache."""
