"""Prints, as PEM, the root certificate with a known fingerprint from a signature.

usage: python tools/signing_root.py SIGNATURE.pem SHA256_OF_THE_CERTIFICATE
"""

from __future__ import annotations

import hashlib
import ssl
import subprocess
import sys


def main(signature: str, fingerprint: str) -> None:
    """Print it, or exit with 1 if the signature does not contain it."""
    command = ["openssl", "pkcs7", "-in", signature, "-print_certs"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for part in text.split("-----BEGIN CERTIFICATE-----")[1:]:
        pem = "-----BEGIN CERTIFICATE-----" + part.partition("-----END")[0] + "-----END CERTIFICATE-----\n"
        if hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest().upper() == fingerprint:
            print(pem, end="")
            return
    sys.exit(f"no certificate of {signature} has the fingerprint {fingerprint}")


if __name__ == "__main__":
    main(*sys.argv[1:])
