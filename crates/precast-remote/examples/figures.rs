//! What `benches/remote.py` needs beside the program: stores of some size, and plain copies by `object_store`.
//!
//! `figures store FOLDER BYTES OBJECTS`, `figures change FOLDER`, `figures up FOLDER BUCKET PREFIX`,
//! `figures down BUCKET PREFIX FOLDER`. Copies have the width of `precast-remote`, and the server of `AWS_ENDPOINT_URL`.
#![allow(clippy::unwrap_used, reason = "a benchmark panics where it fails")]

use std::{fs, io, path::Path, sync::Arc};

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::{
    ClientOptions, ObjectStore, ObjectStoreExt, PutPayload, WriteMultipart,
    aws::{AmazonS3, AmazonS3Builder},
    path::Path as At,
};
use precast_store::{Store, testing};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Files at a time, parts of each at a time, and bytes of a part, as in `src/work.rs` and `src/storage.rs`.
const FILES: usize = 4;
const PARTS: usize = 3;
const PART: usize = 8 << 20;

#[tokio::main]
async fn main() {
    precast_remote::use_ring();
    let all: Vec<String> = std::env::args().skip(1).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    match all[..] {
        ["store", folder, bytes, objects] => {
            store(folder, bytes.parse().unwrap(), objects.parse().unwrap());
        }
        ["change", folder] => change(folder),
        ["up", folder, bucket, prefix] => up(Path::new(folder), s3(bucket), prefix).await,
        ["down", bucket, prefix, folder] => down(s3(bucket), prefix, Path::new(folder)).await,
        _ => panic!("store, change, up or down"),
    }
}

/// Makes a store with a release whose objects are random bytes.
fn store(folder: &str, bytes: u64, objects: u64) {
    let store = Store::create(folder).unwrap();
    let artifacts: Vec<_> = (0..4)
        .map(|n| testing::put_artifact(&store, &format!("block {n}")).id)
        .collect();
    let programs: Vec<_> = artifacts
        .iter()
        .zip(1..)
        .map(|(artifact, batch)| testing::put_program(&store, "m", batch, &[*artifact]).id)
        .collect();
    let mut release = testing::release("m", None, &programs);
    for n in 0..objects {
        let write = &mut |file: &mut fs::File| {
            let mut random = io::Read::take(fs::File::open("/dev/urandom")?, bytes / objects);
            io::copy(&mut random, file).map(|_| ())
        };
        let (digest, _) = (store.objects())
            .put_unpacked(Path::new("random"), write)
            .unwrap();
        release.assets.insert(format!("file {n}"), digest);
    }
    store.releases().put(&release).unwrap();
}

/// Puts another release, which differs in one artifact.
fn change(folder: &str) {
    let store = Store::open(folder).unwrap();
    let mut release = store.releases().get("m", None).unwrap().unwrap();
    let artifact = testing::put_artifact(&store, "another block");
    release.programs[0] = testing::put_program(&store, "m", 99, &[artifact.id]).id;
    store.releases().put(&release).unwrap();
}

fn s3(bucket: &str) -> Arc<AmazonS3> {
    let client = ClientOptions::new()
        .with_allow_http(true)
        .with_timeout_disabled();
    let store = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_client_options(client);
    Arc::new(store.build().unwrap())
}

async fn up(folder: &Path, store: Arc<AmazonS3>, prefix: &str) {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push(path);
            }
        }
    }
    let copy = |path: std::path::PathBuf| {
        let name = path.strip_prefix(folder).unwrap().to_string_lossy();
        let (store, to) = (store.clone(), At::from(format!("{prefix}/{name}")));
        async move {
            let mut left = fs::metadata(&path).unwrap().len() as usize;
            let mut file = tokio::fs::File::open(&path).await.unwrap();
            if left <= PART {
                let mut all = Vec::new();
                file.read_to_end(&mut all).await.unwrap();
                store.put(&to, PutPayload::from(all)).await.unwrap();
                return;
            }
            let upload = store.put_multipart(&to).await.unwrap();
            let mut write = WriteMultipart::new_with_chunk_size(upload, PART);
            while left > 0 {
                let mut part = vec![0; left.min(PART)];
                file.read_exact(&mut part).await.unwrap();
                left -= part.len();
                write.wait_for_capacity(PARTS).await.unwrap();
                write.put(part.into());
            }
            write.finish().await.unwrap();
        }
    };
    let copies = stream::iter(files).map(|path| tokio::spawn(copy(path)));
    let () = copies
        .buffer_unordered(FILES)
        .map(Result::unwrap)
        .collect()
        .await;
}

async fn down(store: Arc<AmazonS3>, prefix: &str, folder: &Path) {
    let from = At::from(prefix);
    let all: Vec<_> = store.list(Some(&from)).try_collect().await.unwrap();
    let copy = |at: At| {
        let name = at
            .as_ref()
            .strip_prefix(prefix)
            .unwrap()
            .trim_start_matches('/');
        let (store, to) = (store.clone(), folder.join(name));
        async move {
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            let mut file = tokio::fs::File::create(&to).await.unwrap();
            let mut body = store.get(&at).await.unwrap().into_stream();
            while let Some(part) = body.next().await {
                file.write_all(&part.unwrap()).await.unwrap();
            }
            file.flush().await.unwrap();
        }
    };
    let copies = stream::iter(all).map(|meta| tokio::spawn(copy(meta.location)));
    let () = copies
        .buffer_unordered(FILES)
        .map(Result::unwrap)
        .collect()
        .await;
}
