"""Small files: written whole or not at all, sealed with a checksum, read strictly. Depends only on girih's errors."""
