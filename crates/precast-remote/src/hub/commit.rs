//! Commits: what one has, and its form, lines of JSON.

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Value, json};

use super::lfs::Pointer;

/// A change of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Another place has the bytes.
    Large(Pointer),
    /// The bytes come with the commit.
    Small(Vec<u8>),
    Deleted,
}

/// Returns the body of a commit on top of `parent`: the Hub refuses it if the branch has moved on.
pub fn body(
    summary: &str,
    parent: &str,
    changes: impl IntoIterator<Item = (String, Change)>,
) -> Vec<u8> {
    let mut body = Vec::new();
    let mut line = |key: &str, value: Value| {
        body.extend(json!({"key": key, "value": value}).to_string().into_bytes());
        body.push(b'\n');
    };
    let header = json!({"summary": summary, "description": "", "parentCommit": parent});
    line("header", header);
    for (path, change) in changes {
        match change {
            Change::Large(Pointer { oid, bytes }) => {
                let value = json!({"path": path, "algo": "sha256", "oid": oid, "size": bytes});
                line("lfsFile", value);
            }
            Change::Small(bytes) => {
                let content = BASE64.encode(bytes);
                let value = json!({"path": path, "content": content, "encoding": "base64"});
                line("file", value);
            }
            Change::Deleted => line("deletedFile", json!({"path": path})),
        }
    }
    body
}

/// Returns the question how small files have to be written, which the Hub decides by its rules for each repository.
pub fn question<'a>(files: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Vec<u8> {
    const SAMPLE: usize = 512;
    let files = files.into_iter().map(|(path, bytes)| {
        let sample = BASE64.encode(bytes.get(..SAMPLE).unwrap_or(bytes));
        json!({"path": path, "size": bytes.len(), "sample": sample})
    });
    json!({"files": files.collect::<Vec<_>>()})
        .to_string()
        .into_bytes()
}

/// Returns the names of the files that have to be written as large ones.
pub fn large(answer: &[u8]) -> Result<Vec<String>, String> {
    #[derive(serde::Deserialize)]
    struct Answer {
        files: Vec<Mode>,
    }
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Mode {
        path: String,
        upload_mode: String,
    }
    let answer: Answer = serde_json::from_slice(answer).map_err(|e| e.to_string())?;
    let large = (answer.files.into_iter()).filter(|file| file.upload_mode == "lfs");
    Ok(large.map(|file| file.path).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_is_lines_of_json() {
        let pointer = Pointer {
            oid: "3f".repeat(32),
            bytes: 7,
        };
        let text = body(
            "Release 1 of \"m\"\n",
            "0123",
            [
                ("objects/3f.zst", Change::Large(pointer)),
                (
                    "releases/m/00000001.json",
                    Change::Small(b"{\"\xff\n".to_vec()),
                ),
                ("old", Change::Deleted),
            ]
            .map(|(name, change)| (name.to_owned(), change)),
        );
        let lines = text
            .strip_suffix(b"\n")
            .unwrap()
            .split(|byte| *byte == b'\n');
        let lines: Vec<Value> = lines
            .map(|line| serde_json::from_slice(line).unwrap())
            .collect();
        let expected = [
            json!({"key": "header", "value":
                {"summary": "Release 1 of \"m\"\n", "description": "", "parentCommit": "0123"}}),
            json!({"key": "lfsFile", "value":
                {"path": "objects/3f.zst", "algo": "sha256", "oid": "3f".repeat(32), "size": 7}}),
            json!({"key": "file", "value":
                {"path": "releases/m/00000001.json", "content": "eyL/Cg==", "encoding": "base64"}}),
            json!({"key": "deletedFile", "value": {"path": "old"}}),
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn the_hub_says_which_files_are_large() {
        let long = [7; 600];
        let asked: Value =
            serde_json::from_slice(&question([("a", &b"{}"[..]), ("b", &long)])).unwrap();
        assert_eq!(
            asked["files"][0],
            json!({"path": "a", "size": 2, "sample": "e30="})
        );
        assert_eq!(asked["files"][1]["sample"], BASE64.encode([7; 512]));
        let answer = br#"{"files":[{"path":"a","uploadMode":"regular","shouldIgnore":false},
            {"path":"b","uploadMode":"lfs","shouldIgnore":false}]}"#;
        assert_eq!(large(answer).unwrap(), ["b"]);
        assert!(large(b"{}").is_err());
    }
}
