use std::{collections::HashMap, fs, path::Path};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use super::*;

/// Writes a safetensors file of float32 vectors.
fn write(path: &Path, tensors: &[(&str, &[f32])]) {
    let bytes: Vec<(&str, Vec<u8>)> = (tensors.iter())
        .map(|(name, values)| (*name, values.iter().flat_map(|v| v.to_le_bytes()).collect()))
        .collect();
    let views = (bytes.iter()).map(|(name, bytes)| {
        let view = TensorView::new(Dtype::F32, vec![bytes.len() / 4], bytes);
        (*name, view.unwrap())
    });
    let text = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    fs::write(path, safetensors::serialize(views, Some(text)).unwrap()).unwrap();
}

fn index(folder: &Path, map: &[(&str, &str)]) {
    let map: serde_json::Map<_, _> = (map.iter())
        .map(|(tensor, file)| ((*tensor).to_owned(), (*file).into()))
        .collect();
    let text = serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": map });
    fs::write(folder.join(INDEX), text.to_string()).unwrap();
}

const INDEX: &str = "model.safetensors.index.json";
const ONE: &str = "model-00001-of-00002.safetensors";
const TWO: &str = "model-00002-of-00002.safetensors";

/// A checkpoint in two files, as `save_pretrained` writes it.
fn two() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let one: [(&str, &[f32]); 2] = [("b", &[1.0; 5]), ("a", &[2.0; 16])];
    write(&folder.path().join(ONE), &one);
    write(&folder.path().join(TWO), &SECOND);
    index(folder.path(), &GOOD);
    folder
}

/// The tensors of the second file.
const SECOND: [(&str, &[f32]); 2] = [("c", &[3.0; 32]), ("é\"", &[4.0])];

/// The files of all tensors.
const GOOD: [(&str, &str); 4] = [("a", ONE), ("b", ONE), ("c", TWO), ("é\"", TWO)];

fn refused(path: &Path) -> String {
    match Checkpoint::open(path) {
        Err(BuildError::BadWeights {
            path: named,
            message,
        }) if named == path => message,
        other => panic!("{:?}", other.map(drop)),
    }
}

#[test]
fn several_files_become_one_weight_set() {
    let folder = two();
    let (_dir, store) = precast_store::testing::store();
    let index = folder.path().join(INDEX);
    let mut digests = BTreeSet::new();
    for path in [folder.path(), &index] {
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(checkpoint.files().len(), 2);
        digests.insert(checkpoint.put_once(&store).unwrap());
        digests.insert(checkpoint.digest(&store).unwrap());
        digests.insert(checkpoint.put(&store).unwrap().0);
    }
    assert_eq!(digests.len(), 1);
    let bytes = store.objects().read(digests.first().unwrap()).unwrap();
    let merged = SafeTensors::deserialize(&bytes).unwrap();
    for (name, value, count) in [
        ("a", 2.0_f32, 16),
        ("b", 1.0, 5),
        ("c", 3.0, 32),
        ("é\"", 4.0, 1),
    ] {
        let tensor = merged.tensor(name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &[count][..]));
        assert_eq!(tensor.data(), value.to_le_bytes().repeat(count), "{name}");
    }
    // Tensors of a multiple of 64 bytes start at one.
    for name in ["a", "c"] {
        let start = merged.tensor(name).unwrap().data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert_eq!(start % 64, 0, "{name}");
    }
    // A changed shard is another weight set.
    write(&folder.path().join(TWO), &[("c", &[3.5; 32]), SECOND[1]]);
    let changed = Checkpoint::open(&index).unwrap().digest(&store).unwrap();
    assert!(!digests.contains(&changed));
}

#[test]
fn tensors_of_several_files_are_aligned_to_their_elements() {
    let folder = tempfile::tempdir().unwrap();
    // Three bytes come before the floats by name.
    let flags = TensorView::new(Dtype::BOOL, vec![3], &[1, 0, 1]).unwrap();
    let numbers = [8_u8; 20];
    let numbers = TensorView::new(Dtype::F32, vec![5], &numbers).unwrap();
    for (name, tensor, view) in [(ONE, "a", flags), (TWO, "b", numbers)] {
        let bytes = safetensors::serialize([(tensor, view)], None).unwrap();
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    index(folder.path(), &[("a", ONE), ("b", TWO)]);
    let (_dir, store) = precast_store::testing::store();
    let put = Checkpoint::open(folder.path())
        .unwrap()
        .put(&store)
        .unwrap();
    let bytes = store.objects().read(&put.0).unwrap();
    let merged = SafeTensors::deserialize(&bytes).unwrap();
    let start = merged.tensor("b").unwrap().data().as_ptr() as usize - bytes.as_ptr() as usize;
    assert_eq!(start % 4, 0);
    assert_eq!(merged.tensor("a").unwrap().data(), [1, 0, 1]);
    assert_eq!(merged.tensor("b").unwrap().data(), [8; 20]);
}

#[test]
fn a_folder_has_one_file_or_one_index() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let none = "the folder has no safetensors file and no index of several";
    assert_eq!(refused(folder.path()), none);
    write(&at("adapter.safetensors"), &[("a", &[1.0])]);
    let found = |path: &Path| Checkpoint::open(path).unwrap().files().to_vec();
    assert_eq!(found(folder.path()), [at("adapter.safetensors")]);
    write(&at("diffusion.safetensors"), &[("a", &[1.0])]);
    let two = "the folder has `adapter.safetensors` and `diffusion.safetensors`: name one of them";
    assert_eq!(refused(folder.path()), two);
    write(&at("model.safetensors"), &[("a", &[1.0])]);
    assert_eq!(found(folder.path()), [at("model.safetensors")]);
    fs::write(at("model.safetensors"), b"PK").unwrap();
    let other = "`model.safetensors`: it is no safetensors file";
    assert_eq!(refused(folder.path()), other);
    assert_eq!(refused(&at("not-there")), "it is not there");
}

#[test]
fn an_index_that_does_not_fit_its_files_is_refused() {
    let folder = two();
    let path = folder.path().join(INDEX);
    let with = |change: &[(&str, &str)]| {
        let mut map = GOOD.to_vec();
        map.retain(|(tensor, _)| !change.iter().any(|(other, _)| other == tensor));
        map.extend(change.iter().filter(|(_, file)| !file.is_empty()));
        index(folder.path(), &map);
        refused(&path)
    };
    for outside in [
        "../other.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "./model-00001-of-00002.safetensors",
        "..",
        "a\0.safetensors",
        "model.bin",
    ] {
        let message = with(&[("a", outside)]);
        let is_outside = message.contains("which is no safetensors file of its folder");
        assert!(is_outside, "{message}");
    }
    insta::assert_snapshot!(with(&[("d", ONE)]), @"tensor `d` is not in `model-00001-of-00002.safetensors`, where the index has it");
    insta::assert_snapshot!(with(&[("b", "")]), @"`model-00001-of-00002.safetensors` has tensor `b`, which the index lacks");
    insta::assert_snapshot!(with(&[("b", TWO)]), @"tensor `b` is in `model-00001-of-00002.safetensors`, and the index has it in `model-00002-of-00002.safetensors`");
    insta::assert_snapshot!(with(&[("a", "model-00003-of-00003.safetensors")]), @"tensor `a` is in `model-00001-of-00002.safetensors`, and the index has it in `model-00003-of-00003.safetensors`");
    let all = GOOD.map(|(tensor, _)| (tensor, "model-00003-of-00003.safetensors"));
    insta::assert_snapshot!(with(&all), @"`model-00003-of-00003.safetensors`: it is not there");
    // A tensor in both files.
    write(
        &folder.path().join(TWO),
        &[SECOND[0], ("a", &[4.0]), SECOND[1]],
    );
    insta::assert_snapshot!(with(&[]), @"tensor `a` is in `model-00002-of-00002.safetensors`, and the index has it in `model-00001-of-00002.safetensors`");
    // A file that was cut off.
    write(&folder.path().join(TWO), &SECOND);
    let whole = fs::read(folder.path().join(TWO)).unwrap();
    fs::write(folder.path().join(TWO), &whole[..whole.len() - 4]).unwrap();
    assert!(with(&[]).starts_with("`model-00002-of-00002.safetensors`: it was cut off"));
    let of_folder =
        "`model.safetensors.index.json`: `model-00002-of-00002.safetensors`: it was cut off";
    assert!(refused(folder.path()).starts_with(of_folder));
    let number = r#"{"weight_map": {"a": 1}}"#;
    for text in ["", "{}", "[]", number, r#"{"weight_map": "x"}"#] {
        fs::write(&path, text).unwrap();
        let message = refused(&path);
        assert!(
            message.starts_with("it is no index of a checkpoint"),
            "{message}"
        );
    }
    fs::write(&path, r#"{"weight_map": {}}"#).unwrap();
    assert_eq!(refused(&path), "the index names no tensor");
}

#[test]
fn dtypes_that_no_weight_set_holds_are_refused() {
    let folder = two();
    let header = r#"{"c":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&[0; 8]);
    fs::write(folder.path().join(TWO), file).unwrap();
    let message = refused(&folder.path().join(INDEX));
    insta::assert_snapshot!(message, @"`model-00002-of-00002.safetensors`: tensor `c` is F8_E4M3, which no weight set can hold");
}
