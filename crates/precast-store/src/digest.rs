//! SHA-256 digests as a type, so that a key and a file name can't be mixed up with other text.

use std::{fmt, io, path::Path, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest. Written as 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

/// The text was not 64 lower-case hex digits.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a digest: expected 64 lower-case hex digits")]
pub struct NotADigest(String);

impl Digest {
    /// Number of hex digits of a digest in output for people.
    pub const SHORT: usize = 12;

    /// Returns the digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Returns the digest and the length in bytes of all that `reader` yields.
    pub fn of_reader(reader: &mut impl io::Read) -> io::Result<(Self, u64)> {
        let mut hasher = Hasher::default();
        let size = io::copy(reader, &mut hasher)?;
        Ok((hasher.finish(), size))
    }

    /// Returns the digest and the length in bytes of the file at `path`.
    pub fn of_file(path: &Path) -> io::Result<(Self, u64)> {
        Self::of_reader(&mut std::fs::File::open(path)?)
    }

    /// Wraps the 32 bytes of a digest, as read from the index.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the raw 32 bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the 64 hex digits.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }

    /// Returns the first 12 hex digits, as `ls` prints them. Every command accepts them.
    pub fn short(&self) -> String {
        hex::encode(&self.0[..Self::SHORT / 2])
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({})", self.short())
    }
}

impl FromStr for Digest {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Self, NotADigest> {
        let lower = text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let mut bytes = [0; 32];
        if lower && hex::decode_to_slice(text, &mut bytes).is_ok() {
            Ok(Self(bytes))
        } else {
            Err(NotADigest(text.to_owned()))
        }
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Digest {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Digest".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "pattern": "^[0-9a-f]{64}$" })
    }
}

/// Computes the digest of the bytes that are written to it.
#[derive(Clone, Default)]
pub struct Hasher(Sha256);

impl Hasher {
    /// Adds `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the digest of all added bytes.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

impl io::Write for Hasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_vector_round_trips() {
        let digest = Digest::of(b"abc");
        let hex = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest.hex(), hex);
        assert_eq!(digest.short(), &hex[..12]);
        assert_eq!(hex.parse::<Digest>().unwrap(), digest);
        assert_eq!(Digest::of_reader(&mut &b"abc"[..]).unwrap(), (digest, 3));
        let json = serde_json::to_string(&digest).unwrap();
        assert_eq!(serde_json::from_str::<Digest>(&json).unwrap(), digest);
    }

    #[test]
    fn other_text_is_refused() {
        for text in ["", "abc", &"g".repeat(64), &"A".repeat(64), &"a".repeat(65)] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }
}
