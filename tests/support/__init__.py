"""What tests share: fake workers, made data, real processes of several kinds."""
