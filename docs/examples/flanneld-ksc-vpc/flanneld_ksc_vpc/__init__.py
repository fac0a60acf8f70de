"""Backend for flanneld that maintains routes in a VPC of Kingsoft Cloud."""
