"""How long a batch takes: fitted from measurements, or from a hardware sheet."""
